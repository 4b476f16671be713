"""`python -m benchmarks`."""

from .loss import main

if __name__ == "__main__":
    main()
