"""Where tasks come from: one module for each kind, every one a pure function of its arguments."""
