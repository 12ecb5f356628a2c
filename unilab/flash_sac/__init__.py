"""FlashSAC: unit-norm networks with batch statistics, a categorical critic pair and scaled rewards."""
