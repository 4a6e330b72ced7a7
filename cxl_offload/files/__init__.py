"""Files of people and programs: read with line numbers, decoded strictly, written as a whole."""

from cxl_offload.files.bounds import FieldError, bounds, check_numbers
from cxl_offload.files.codec import DecodeError, decode, encode
from cxl_offload.files.document import Field, MappedFields, hint, read_document, shown
from cxl_offload.files.picture import save_figure
from cxl_offload.files.shipped import shipped_file, shipped_names
from cxl_offload.files.text import (
    decode_document,
    decode_json,
    parse_json,
    read_json_lines,
    read_text,
    why_not_writable,
    write_text,
)

__all__ = [
    "DecodeError",
    "Field",
    "FieldError",
    "MappedFields",
    "bounds",
    "check_numbers",
    "decode",
    "decode_document",
    "decode_json",
    "encode",
    "hint",
    "parse_json",
    "read_document",
    "read_json_lines",
    "read_text",
    "save_figure",
    "shipped_file",
    "shipped_names",
    "shown",
    "why_not_writable",
    "write_text",
]
