"""LETOR/SVMLight text: reader, from text to blocks to lines (compiled or plain) to a matrix."""
