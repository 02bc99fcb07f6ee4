"""From rows to tables, figures and pages. Nothing here needs a model, or torch."""
