"""What the package exports."""

import blend_kernels


def test_all_names_every_public_op():
    public = {
        name
        for name, value in vars(blend_kernels).items()
        if not name.startswith("_")
        and not hasattr(value, "__path__")
        and hasattr(value, "__module__")
    }
    assert public == set(blend_kernels.__all__)
