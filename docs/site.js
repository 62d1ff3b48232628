// Browsers do not let a page from a disk read the search index.
if (location.protocol === "file:") {
  document.addEventListener("DOMContentLoaded", () => {
    const note = document.createElement("p");
    note.className = "site-from-disk";
    note.textContent = "These pages are opened from a folder, where the search does not work. To search, run mkdocs serve.";
    document.querySelector(".md-content").prepend(note);
  });
}
