"""What the recipes stand on and no model needs: files that survive a kill, tables in Markdown, figures of the machine."""
