"""What several recipes need: rows as inputs, files that survive a kill, tables in Markdown,
measurements of the machine."""
