"""Cases for several servers, and pages with the expected outcomes where two servers, or a server and an RFC, differ."""


def differences(page):
    """Return the name of each case in the page's tables, the outcome there, and the one of this server."""
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    return {name: (there.strip("`"), ours.strip("`")) for name, there, ours, why in rows if there[0] == "`" and why}


def check(page, names, same):
    """Check that each case has either one outcome or two different ones on the page."""
    found = differences(page)
    assert (len(set(names)), set(names) - set(same)) == (len(names), found.keys())
    assert not [name for name, (there, ours) in found.items() if there == ours]
