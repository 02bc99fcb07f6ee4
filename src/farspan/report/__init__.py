"""From rows to tables and pictures. Nothing here needs a model, or torch."""
