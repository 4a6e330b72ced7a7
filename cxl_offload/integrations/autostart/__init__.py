"""The folder that ``cxl-offload run`` puts on PYTHONPATH: Python loads its sitecustomize."""
