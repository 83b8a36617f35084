"""Tables of other tools: files, shapes, columns, values and trackers, read and converted to our columns."""
