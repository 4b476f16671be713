"""Speed and memory of torch_pfc beside plain PyTorch, as ratios of one run: `make bench`, docs/speed.md."""
