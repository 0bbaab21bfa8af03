"""Figures as PNG files, drawn without a display: of a run, of heads, of recall, of a sweep, of a
study, of a benchmark."""
