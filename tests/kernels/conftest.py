import pytest

pytest.register_assert_rewrite("kernel_cases")
