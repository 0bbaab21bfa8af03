"""What several recipes need: files that survive a kill, tables in Markdown, measurements of the machine."""
