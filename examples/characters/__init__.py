"""Open-set recognition of Chinese characters across typefaces, trained with Partial FC."""
