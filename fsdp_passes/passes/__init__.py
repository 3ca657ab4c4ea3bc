"""One file per pass. Passes never import each other; what they share is in `_graph.py`."""
