"""`python -m blend_gateway`, the same as the command `blendgate`."""

import sys

from blend_gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
