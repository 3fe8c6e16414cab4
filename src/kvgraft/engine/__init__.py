"""The native host: a small engine with its own paged KV pool, for CPU and CUDA."""
