// Asks for the API key where the server wants one.

import { isKeyKept, storeKey, storedKey } from "./api.js";

/** Ask for a key, and say why; what it was wanted for is done `then`. */
export function askForKey(why, then = () => {}) {
  const dialog = document.getElementById("key-dialog"), form = document.getElementById("key-form");
  const key = document.getElementById("key"), keep = document.getElementById("keep-key");
  const reason = document.getElementById("key-why");
  reason.textContent = why;
  if (!dialog.open) { // what is being typed stays
    key.value = storedKey() ?? "";
    keep.checked = isKeyKept();
  }
  form.onsubmit = (event) => {
    event.preventDefault();
    if (!/^[\x21-\x7e]+$/.test(key.value.trim())) {
      reason.textContent = "A key has letters, digits and signs of ASCII only.";
      return;
    }
    try {
      storeKey(key.value.trim(), keep.checked);
    } catch {
      reason.textContent = "This browser does not let the page keep the key: allow it to store data.";
      return;
    }
    dialog.close();
    then();
  };
  const forget = document.getElementById("forget-key");
  forget.hidden = storedKey() === null;
  forget.onclick = () => {
    storeKey(null, false);
    dialog.close();
  };
  document.getElementById("cancel-key").onclick = () => dialog.close();
  if (!dialog.open) dialog.showModal();
}
