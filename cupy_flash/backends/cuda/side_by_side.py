"""Calls in threads of their own, where threads are to be had."""


def side_by_side(function, arguments):
    """``[function(*one) for one in arguments]``, the first here, the others in threads.

    Those for which no thread is left come here after it: there are limits to the number of threads,
    and while the interpreter ends none can be started.
    """
    first, *others = arguments or [None]
    if not others:
        return [function(*one) for one in arguments]
    try:
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(len(others))
    except (ImportError, RuntimeError):     # the interpreter ends: not even the import works
        return [function(*one) for one in arguments]
    with pool:
        started = []
        try:
            for one in others:
                started.append(pool.submit(function, *one))
        except RuntimeError:
            pass
        # A thread that did start may take up the call whose thread did not: done twice, no harm.
        here = [function(*one) for one in (first, *others[len(started):])]
        return [here[0], *(call.result() for call in started), *here[1:]]
