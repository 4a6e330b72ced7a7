"""From one server's plan to a fleet: arrivals, waiting, servers, cost."""
