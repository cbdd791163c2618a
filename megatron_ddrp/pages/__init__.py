"""Pages and figures of all commands: Markdown, HTML and the style of the figures."""
