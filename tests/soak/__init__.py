"""The soak: threads, random operations and faults for as long as asked, with checks in between."""
