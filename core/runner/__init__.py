"""The engine: scheduler, paged KV cache, target model and the step loop."""
