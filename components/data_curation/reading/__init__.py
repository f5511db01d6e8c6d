"""Find source files and turn their contents into rows.

`source_files` lists and digests the files, `file_readers` splits them into records, and `record_formats` parses a
record into rows.
"""
