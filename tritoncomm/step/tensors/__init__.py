"""Names, shards and buffers of tensors."""
