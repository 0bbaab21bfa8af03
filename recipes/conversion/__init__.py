"""Conversion of a pretrained model: its own full attention as the teacher of its memories."""
