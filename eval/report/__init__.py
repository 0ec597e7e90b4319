"""The schema of report.json, and the model card, HTML report and plots made from it alone."""
