"""Programs that use torch_pfc."""
