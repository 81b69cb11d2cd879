//! Machines: levels of devices joined by links, and the mesh axes that they offer.
