"""What people look at: the card, the page, pictures. Made from report.json alone; nothing is measured here."""
