"""What a run is doing, in tables and data.

param_groups   `summarize_param_groups`: where every parameter went
exchange       `summarize_exchange`: what a step sends between ranks, and who computes
"""
