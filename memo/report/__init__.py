"""What people read: tables and timelines drawn from artifacts."""
