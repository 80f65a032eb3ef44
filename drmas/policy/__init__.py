"""One policy: its Megatron model, optimiser step, checkpoint and Hugging Face conversion."""
