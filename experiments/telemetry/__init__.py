"""What a run recorded: its tables read, drawn, and written for other programs."""
