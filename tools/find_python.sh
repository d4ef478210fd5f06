#!/bin/sh
# Print the first Python that fits: $PYTHON, else python3.11, 3.12, 3.13 or python3. One sentence if there is none.
for python in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
if [ -n "$PYTHON" ]; then
    echo "PYTHON is $PYTHON, which is not a Python 3.11, 3.12 or 3.13. Name one that is, or unset PYTHON." >&2
else
    echo "No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make run PYTHON=/path/to/python3.11" >&2
fi
exit 1
