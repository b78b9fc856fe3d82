"""Float64 oracles: slow, obvious, written from the papers' equations; nothing here imports dmuown."""
