"""The HTTP routes; each module adds its own to the application."""
