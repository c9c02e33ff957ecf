"""A picture of a controller for people, in their browsers, beside its metrics.

    views   what each page shows, as JSON, read off the controller's parts when somebody asks
    live    the same again once a second, for some viewers at a time
    site    paths: the page's files, which everybody may have, and what they ask for
    standby the same paths where another controller leads: that it does
    static  the page itself: HTML, style, scripts and uPlot, as browsers take them; there is no build step

Nobody looks: nothing is done. Nothing is counted for the dashboard while requests are served; a look reads at most some
thousand rows of telemetry, in slices between which requests have their turn, and whoever looks at the same page gets
the same look. A viewer that is too slow misses looks, which nobody keeps.

Nothing can be changed from here. A caller's key stays in the tab where it was typed and comes in a header, never in a
cookie, so that no other page can make a browser show it.
"""
