def progress(x, **k):
    return x
