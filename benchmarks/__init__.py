"""Speed and memory as ratios: `make bench`."""
