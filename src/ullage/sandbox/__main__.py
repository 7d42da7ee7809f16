"""`python -P -m ullage.sandbox MODULE:FUNCTION CHANNEL TOLD`: how `parent.start` starts a child."""

import sys

from ullage.sandbox.child import main

if __name__ == "__main__":
    main(*sys.argv[1:])
