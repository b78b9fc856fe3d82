"""What a run is doing, in tables and data.

param_groups   `summarize_param_groups`: where every parameter went
"""
