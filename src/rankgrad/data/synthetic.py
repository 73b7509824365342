"""The former home of `rankgrad.data.synthetic`, the function; it lives in `rankgrad.data.synthesis`."""

from rankgrad.data.synthesis import synthetic as synthetic
