"""``fsdp2 report DIR``: what a run has written down, as one HTML page that needs nothing else.

reading    the files of a run's folder, as values
figures    values to figures of plotly, as plain dicts
tables     values to rows of text
page       figures and tables to HTML
command    the command
"""
