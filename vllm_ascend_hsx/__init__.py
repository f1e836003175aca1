"""Hidden-state extraction for vLLM on Ascend NPUs."""
