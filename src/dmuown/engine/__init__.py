"""The engine: groups to records, records to a plan, and a plan to one step for every algorithm."""
