"""One test over hundreds of values: a test for each would take longer to list and to report than to run."""

import pytest


def for_each(values, name=str):
    """A decorator: the check of one value becomes a test of all, which fails with the names of those that are wrong."""

    def of_all(check):
        def test():
            wrong, every = {}, list(values)
            assert every, "there is no value to check"
            for value in every:
                try:
                    check(value)
                except (AssertionError, pytest.fail.Exception) as error:
                    wrong[name(value)] = str(error)
            assert not wrong, "\n".join(f"{each}: {said}" for each, said in wrong.items())

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return of_all
