"""The demo: SmolLM2-135M-Instruct learns to answer questions about Python's standard library.

    python -m dmuown.automodel.demo --output runs/demo [--optimizer muown | muon | adamw]

Everything is local: the checkpoint comes from an installed package, the data from the interpreter.
"""
