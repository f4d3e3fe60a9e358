"""From records to what people look at: one HTML page, tables, figures.

records on disk ─► gather.py ─► tables.py ─► page.py (HTML), export.py (Markdown, LaTeX, CSV, figures)
"""
