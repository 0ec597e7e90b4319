"""Makes the card, the page and the pictures from report.json alone; nothing is measured here."""
