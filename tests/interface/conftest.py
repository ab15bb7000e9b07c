"""Marks that SciPy's own tests carry, so that they can be imported under --strict-markers."""


def pytest_configure(config):
    for line in (
        "thread_unsafe(reason): no test for parallel threads",
        "fail_slow(seconds): a test that takes long",
    ):
        config.addinivalue_line("markers", line)
