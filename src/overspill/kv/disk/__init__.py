"""The disk tier below RAM: KV that outlives the process, found by content and verified on every read."""
